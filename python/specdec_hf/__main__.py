from specdec_hf.cli import interrupt
from specdec_hf.requirements import explain

if __name__ == "__main__":
    with interrupt.in_one_line():
        try:
            from specdec_hf.cli.app import main
        except ImportError as error:
            raise SystemExit(f"error: {explain(error)}") from None

        main()
