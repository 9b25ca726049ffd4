"""Training LISA-Mini: the loop, the loss, the batches."""
