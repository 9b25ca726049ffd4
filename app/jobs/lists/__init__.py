"""Lists for all users at once, such as those of an e-mail."""
