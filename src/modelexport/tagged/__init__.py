"""The map: records, tables, the tagged model, strip and scrub."""
