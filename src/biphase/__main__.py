from biphase.cli import main

main()
