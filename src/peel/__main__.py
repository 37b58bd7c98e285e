"""`python -m peel`."""

import sys

from .cli import main

sys.exit(main())
