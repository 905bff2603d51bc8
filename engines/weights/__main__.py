"""``python -P -m engines.weights``: one staging."""

import sys

from engines.weights import process

sys.exit(process.main())
