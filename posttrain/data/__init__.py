"""From files to samples: reading, encoding, data sets in memory or on disk, packing into micro-batches."""
