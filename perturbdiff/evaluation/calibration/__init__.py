"""Which metrics can tell good predictions from bad ones on a data set, and how predictable the data set is."""
