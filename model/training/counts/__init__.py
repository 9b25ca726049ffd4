"""What is counted of training events beside the model: pairs of items, and what was bought."""
