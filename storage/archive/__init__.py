"""The archive of the log: Parquet files, their manifest, reading and writing them."""
