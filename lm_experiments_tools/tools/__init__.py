"""The console command `lmtools`, one file per subcommand."""
