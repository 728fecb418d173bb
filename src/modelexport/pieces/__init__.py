"""Parts of a tagged model as models of their own: one module cut out, or a module taken apart."""
