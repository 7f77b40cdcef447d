"""Training on several processes: how they are started, meet and end."""
