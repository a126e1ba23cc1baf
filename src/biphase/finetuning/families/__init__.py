"""The families of tasks: each is a kind of splits, with its targets, loss, predictions and their metrics."""
