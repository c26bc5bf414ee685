"""Node classification with a graph convolution, node-level private."""
