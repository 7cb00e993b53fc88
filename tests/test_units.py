import pytest

from stepbench import units


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (12.3456, 0.213, "12.3 ± 0.2"),
        (12.3456, 0.0123, "12.346 ± 0.012"),
        (9.9984, 0.1079, "10.00 ± 0.11"),
        (12.3456, 0.96, "12 ± 1"),
        (1234.5, 25.0, "1,234 ± 25"),
        (10.0, 0.0, "10.00 ± 0"),
        (12.3456, None, "12.3"),
        (None, 0.1, "–"),
    ],
)
def test_value_is_as_precise_as_its_half_width(value: float | None, half_width: float | None, text: str) -> None:
    assert units.format_with_half_width(value, half_width) == text


def test_wide_interval_is_given_by_its_ends() -> None:
    assert units.format_with_interval(41.0, 25.6, 112.0) == "41.0 [26, 112]"
    assert units.format_with_interval(12.3456, 12.1, 12.5) == "12.3 ± 0.2"
    assert units.format_with_interval(12.3456, None, None) == "12.3"


def test_lone_value_has_at_most_four_figures() -> None:
    assert units.format_value(12.3456, 0.0123) == "12.35"
    assert units.format_value(12.3456, 0.213) == "12.3"
    assert units.format_value(12345.6, 0.2) == "12,346"


def test_duration_with_half_width_reads_like_the_specification() -> None:
    assert units.format_duration(0.0123456, half_width_s=0.000213) == "12.3 ± 0.2 ms"


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.50 s"), (0.0125, "12.5 ms"), (12.5e-6, "12.5 µs"), (0.0, "0 ms"), (None, "–")]
)
def test_lone_duration_picks_its_unit(seconds: float | None, text: str) -> None:
    assert units.format_duration(seconds) == text


def test_column_has_the_unit_of_its_middle_value() -> None:
    assert units.duration_unit([0.0004, 0.012, 1.2, None]).name == "ms"
    assert units.duration_unit([]).name == "ms"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.62, "62 %"), (0.043, "4.3 %"), (0.0996, "10 %"), (0.0, "0 %"), (0.0001, "<0.1 %"), (1.0, "100 %"), (None, "–")],
)
def test_percentages_have_no_decimals_from_ten_on(fraction: float | None, text: str) -> None:
    assert units.format_fraction(fraction) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(1234.4, "1,234 samples/s"), (86.25, "86.2 samples/s"), (3.14159, "3.14 samples/s"), (None, "–")]
)
def test_throughput_has_thousands_separated(rate: float | None, text: str) -> None:
    assert units.format_throughput(rate) == text


def test_ratio_and_memory() -> None:
    assert units.format_ratio(1.234) == "×1.23"
    assert units.format_ratio(None) == "–"
    assert units.format_bytes(3 * 1024**3) == "3.00 GiB"
    assert units.format_bytes(512 * 1024**2) == "512 MiB"


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.8, "1.8 × faster"),
        (1 / 5.2, "5.2 × slower"),
        (1.25, "1.25 × faster"),
        (1.019, "the same"),
        (1 / 1.019, "the same"),
        (1.03, "1.03 × faster"),
        (120.4, "120 × faster"),
        (None, "–"),
    ],
)
def test_speed_up_in_words(ratio: float | None, text: str) -> None:
    assert units.format_speed(ratio) == text


def test_counts_agree_with_their_noun() -> None:
    assert units.format_count(1, "batch", "batches") == "1 batch"
    assert units.format_count(1200, "batch", "batches") == "1,200 batches"
