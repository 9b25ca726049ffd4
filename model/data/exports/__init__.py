"""Tables as shops' programs export them: with columns, times and numbers of their own."""
