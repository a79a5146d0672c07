from specdec_hf.cli import interrupt

if __name__ == "__main__":
    with interrupt.in_one_line():
        from specdec_hf.cli.app import main

        main()
