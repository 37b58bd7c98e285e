"""Networks, data, processes and commands that tests share."""
