package account

import (
	"cmp"
	"slices"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/limits"
)

// AttachNetworkInterfaceRequest is the input of AttachNetworkInterface.
type AttachNetworkInterfaceRequest struct {
	DryRun             `query:",inline"`
	NetworkInterfaceID ENIID      `query:"NetworkInterfaceId"`
	InstanceID         InstanceID `query:"InstanceId"`
	DeviceIndex        *int       `query:"DeviceIndex"`
	NetworkCardIndex   int        `query:"NetworkCardIndex"`
}

// AttachNetworkInterfaceResponse is the output of AttachNetworkInterface.
type AttachNetworkInterfaceResponse struct {
	AttachmentID     AttachmentID
	NetworkCardIndex int
}

// AttachNetworkInterface attaches an available interface to an instance in the
// same zone. The attachment is not deleted on termination until
// ModifyNetworkInterfaceAttribute says so.
func (a *Account) AttachNetworkInterface(req AttachNetworkInterfaceRequest) (AttachNetworkInterfaceResponse, *Error) {
	var resp AttachNetworkInterfaceResponse
	err := a.mutate(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		if req.DeviceIndex == nil {
			return missing("deviceIndex")
		}
		if req.InstanceID == "" {
			return missing("instanceId")
		}
		eni, err := s.eni(req.NetworkInterfaceID)
		if err != nil {
			return err
		}
		instance, err := s.instance(req.InstanceID, now)
		if err != nil {
			return err
		}
		if instance.State != StateRunning && instance.State != StateStopped {
			return Errorf("IncorrectState", "Instance '%s' is not 'running'.", instance.ID)
		}
		if eni.Zone != instance.Zone {
			return combination("You may not attach a network interface to an instance if they are not in the same availability zone")
		}
		eni, err = s.attach(eni, instance, *req.DeviceIndex, req.NetworkCardIndex, false, now)
		if err != nil {
			return err
		}
		resp = AttachNetworkInterfaceResponse{AttachmentID: eni.Attachment.ID, NetworkCardIndex: req.NetworkCardIndex}
		return nil
	})
	return resp, err
}

// attach joins the two if the limits of the instance's type allow it.
func (s *state) attach(eni NetworkInterface, instance Instance, index, card int, deleteOnTermination bool, now time.Time) (NetworkInterface, *Error) {
	if eni.Attachment != nil {
		return eni, Errorf("InvalidNetworkInterface.InUse", "Interface: [%s] in use.", eni.ID)
	}
	limit, _ := s.limits.Lookup(instance.Type)
	if card < 0 || card >= len(limit.Cards) {
		return eni, invalid("Network card index '%d' is not valid for instance type '%s'.", card, instance.Type)
	}
	if index < 0 {
		return eni, invalid("Invalid device index '%d'.", index)
	}
	onCard := 0
	for _, id := range instance.Interfaces {
		other, _ := s.enis.get(id)
		if other.Attachment.NetworkCard == card {
			onCard++
		}
	}
	if onCard+1 > limit.Cards[card] {
		return eni, Errorf("AttachmentLimitExceeded", "Interface count %d exceeds the limit for %s", onCard+1, instance.Type)
	}
	for _, id := range instance.Interfaces {
		other, _ := s.enis.get(id)
		if other.Attachment.NetworkCard == card && other.Attachment.DeviceIndex == index {
			return eni, invalid("Instance '%s' already has an interface attached at device index '%d'.", instance.ID, index)
		}
	}
	if err := checkSlots(eni, limit); err != nil {
		return eni, err
	}
	eni.Status = StatusInUse
	eni.Attachment = &Attachment{
		ID: AttachmentID(s.newID("eni-attach-")), Instance: instance.ID, DeviceIndex: index, NetworkCard: card,
		DeleteOnTermination: deleteOnTermination, Status: StatusAttached, Time: now,
	}
	s.enis.put(eni.ID, eni)
	s.attachments.put(eni.Attachment.ID, eni.ID)
	instance.Interfaces = append(slices.Clone(instance.Interfaces), eni.ID)
	slices.SortFunc(instance.Interfaces, func(a, b ENIID) int {
		x, _ := s.enis.get(a)
		y, _ := s.enis.get(b)
		return cmp.Or(cmp.Compare(x.Attachment.NetworkCard, y.Attachment.NetworkCard),
			cmp.Compare(x.Attachment.DeviceIndex, y.Attachment.DeviceIndex))
	})
	s.instances.put(instance.ID, instance)
	return eni, nil
}

func checkSlots(eni NetworkInterface, limit limits.Type) *Error {
	if slots := eni.Slots(); slots > limit.AddressesPerInterface {
		return Errorf("InvalidInterface.IpAddressLimitExceeded", "Address count %d exceeds the limit for %s", slots, limit.Name)
	}
	return nil
}

// DetachNetworkInterfaceRequest is the input of DetachNetworkInterface. Force
// changes nothing, for detaching never hangs here.
type DetachNetworkInterfaceRequest struct {
	DryRun       `query:",inline"`
	AttachmentID AttachmentID `query:"AttachmentId"`
	Force        bool         `query:"Force"`
}

// DetachNetworkInterface takes an interface from its instance; the primary one
// stays.
func (a *Account) DetachNetworkInterface(req DetachNetworkInterfaceRequest) *Error {
	return a.mutate(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		if req.AttachmentID == "" {
			return missing("attachmentId")
		}
		id, err := find(s.attachments, kindAttachment(), req.AttachmentID)
		if err != nil {
			return err
		}
		eni, _ := s.enis.get(id)
		if eni.Attachment.DeviceIndex == 0 && eni.Attachment.NetworkCard == 0 {
			return Errorf("OperationNotPermitted", "The network interface at device index 0 cannot be detached.")
		}
		s.detach(eni)
		return nil
	})
}

func (s *state) detach(eni NetworkInterface) NetworkInterface {
	instance, _ := s.instances.get(eni.Attachment.Instance)
	instance.Interfaces = slices.DeleteFunc(slices.Clone(instance.Interfaces), func(id ENIID) bool { return id == eni.ID })
	s.instances.put(instance.ID, instance)
	s.attachments.del(eni.Attachment.ID)
	eni.Attachment = nil
	eni.Status = StatusAvailable
	s.enis.put(eni.ID, eni)
	return eni
}
