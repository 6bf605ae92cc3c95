"""What every package uses: types, errors, maths without a model, atomic files, logging, metrics, progress."""
