#!/usr/bin/env bash
# Runs on each spot node: when EC2 announces that it will take the node back, tell Ray, so that training saves in time.
# EC2 gives two minutes at best and writes the notice into the instance's metadata; Ray's open-source autoscaler does not
# read it. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
set -u
metadata="${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}"
metadata="${metadata%/}"
while true; do
  token=$(curl -sf -m 2 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$metadata/latest/api/token")
  if notice=$(curl -sf -m 2 -H "X-aws-ec2-metadata-token: $token" "$metadata/latest/meta-data/spot/instance-action"); then
    at=$(sed -E 's/.*"time": *"([^"]+)".*/\1/' <<<"$notice")
    left=$(($(date -d "$at" +%s) - $(date +%s)))
    ray drain-node "$@" --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "EC2: $notice" \
      --deadline-remaining-seconds "$((left > 0 ? left : 0))" && exit 0
  fi
  sleep "${POLL_SECONDS:-2}"
done
