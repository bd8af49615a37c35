"""Options, help, exit codes and output that commands of the command line and jobs share."""
