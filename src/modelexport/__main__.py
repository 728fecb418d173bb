"""Run the command line as `python -m modelexport`."""

from modelexport.cli.main import main

if __name__ == "__main__":
    main(prog_name="modelexport")
