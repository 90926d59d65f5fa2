"""`python -m qvattn.cli`: the same as the console script `qvattn`; the comparison starts its runs this way."""

import sys

from qvattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
