"""`jaxrun train` for launchers that want a file."""

import sys

from jaxrun.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
