"""The command line. Each group of commands has its own file. No other package imports this one."""
