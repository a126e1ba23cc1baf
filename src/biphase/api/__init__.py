"""The verbs of biphase for Python, under the names by which users know them. The command line calls them too: their
defaults and what they say are its own. Heavy imports happen inside the verb that needs them."""
