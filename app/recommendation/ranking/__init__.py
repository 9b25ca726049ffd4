"""From the stored states of users to their ranked items: everything but input and output."""
