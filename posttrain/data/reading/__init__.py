"""From files to examples: sources, file types, formats of records, mixtures."""
