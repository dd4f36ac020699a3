"""The reference backend and the online softmax written out as the recurrence it is."""
