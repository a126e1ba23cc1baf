"""Export of networks: folders for other libraries, cards, the Hub."""
