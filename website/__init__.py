"""The documentation site: reference pages that are made from the code, and what mkdocs does at the end of a build."""
