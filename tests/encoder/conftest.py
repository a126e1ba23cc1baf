"""What several of these tests make lies in `tiny_families.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
