"""Training: from stores and splits to a bundle; resumable, and equal however often it was interrupted."""
