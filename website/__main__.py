"""Write the reference pages that are made from the code: `python -m website`."""

from website.generated_pages import write

write()
