"""Reports for people: HTML pages, tables, plots and progress displays."""
