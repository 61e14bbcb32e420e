"""What the backward pass keeps."""
