"""The functions that biphase offers to Python. The command line calls them too, and takes its defaults and descriptions
from them. Heavy imports happen inside the function that needs them."""
