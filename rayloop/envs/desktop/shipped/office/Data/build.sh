#!/bin/sh
echo built > "$HOME/Data/result.txt"
