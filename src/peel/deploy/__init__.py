"""From a slim network to one that runs elsewhere: timing, export, int8, evaluation."""
