"""`python -m rivers.main fit --config fixed_config.yaml`."""

from lightning.pytorch.cli import LightningCLI

from rivers.data import RiverData
from rivers.model import BareForecast


class RiverCLI(LightningCLI):
    """The module learns from the data how large a batch is."""

    def add_arguments_to_parser(self, parser) -> None:
        parser.link_arguments("data.loader.batch_size", "model.batch_size")


def main() -> None:
    RiverCLI(BareForecast, RiverData)


if __name__ == "__main__":
    main()
