"""Controlled studies: one file → arms, trained and compared. Where it is called, it is the verb `biphase.study`."""

import sys

from biphase import VerbFolder

sys.modules[__name__].__class__ = VerbFolder
