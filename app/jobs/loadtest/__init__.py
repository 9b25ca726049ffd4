"""`lisarec bench`: load at given rates against services of given sizes."""
