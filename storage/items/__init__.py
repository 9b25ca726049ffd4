"""Item data, the same for all stores."""
