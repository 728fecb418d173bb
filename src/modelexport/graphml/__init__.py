"""A model as a pair of files for graph editors, GraphML and raw weights, and back without loss."""
