"""Networks that are given away: folders for other libraries, cards, the hub."""
