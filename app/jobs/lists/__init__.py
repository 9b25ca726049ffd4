"""Lists for all users at once, for example for an e-mail campaign."""
