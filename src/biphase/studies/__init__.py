"""Controlled studies: one file → arms, trained and compared."""
