"""A pretrained transformer, fine-tuned with privacy."""
