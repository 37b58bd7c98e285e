"""`python -m peel`."""

import sys

from .cli.main import main

sys.exit(main())
