from oxrl.cli import main

main()
