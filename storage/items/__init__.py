"""What stores keep of items, whichever store it is."""
