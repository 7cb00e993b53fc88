"""Aggregate the records of one or several sweeps: `python scripts/aggregate.py DIR [DIR...] [--out DIR]`."""

import sys

from stepbench.aggregate import main

sys.exit(main())
