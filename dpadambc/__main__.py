"""`python -m dpadambc`."""

import sys

from dpadambc.cli import main

sys.exit(main())
