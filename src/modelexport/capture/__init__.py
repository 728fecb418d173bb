"""Everything that touches an exporter: inputs, model state, module tree, calls and traces."""
